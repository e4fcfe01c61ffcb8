#!/bin/sh
# Convert, prove, judge, publish: what the GitHub action, the GitLab job, the container and the Slurm job run.
#
#   pipeline.sh SRC OUT [REPO]
#
# SRC: a folder, or org/name[@revision] on the Hub. REPO: where a good result goes (HF_TOKEN in the environment).
# Each step is an exit code: the first one that is not 0 ends it, and nothing is pushed. Run again, it resumes; an OUT of
# another source or with other settings is refused.
# The proof compares every tensor with the source: it needs SRC as a folder. Of a SRC on the Hub files and structure of
# OUT are verified, and its figures are those of the run; the script says so.
# RESULTS (default results): plan.json, convert.json, events.jsonl, verify.json, report.xml (JUnit), summary.md.
# ENGINE, TP: who will serve it. MAX_REL_ERROR: the limit of each tensor. Every option of kizami can be set as a
# variable, too: KIZAMI_GROUP_SIZE=64.
set -eu

src=$1
out=$2
repo=${3:-}
results=${RESULTS:-results}
mkdir -p "$results"

step() { # step FILE COMMAND...: its object goes to FILE, and is shown if it fails
    file=$results/$1
    shift
    code=0
    "$@" --json > "$file" || code=$?
    if [ "$code" -ne 0 ]; then
        cat "$file" >&2
        exit "$code"
    fi
}

plan_of() { # the hash of source headers and settings in a file
    sed -n 's/.*"plan_hash": "\([0-9a-f]*\)".*/\1/p' "$1" | head -n 1
}

step plan.json kizami plan "$src" --tp "${TP:-1}"
if [ -e "$out/kizami.json" ]; then
    made=$(cat "$results/source" 2> /dev/null || true)
    if [ "$made" != "$src" ] || [ "$(plan_of "$results/plan.json")" != "$(plan_of "$out/kizami.json")" ]; then
        echo "pipeline.sh: $out was not made from $src with these settings; name another OUT" >&2
        exit 2
    fi
else
    echo "$src" > "$results/source"
    step convert.json kizami convert "$src" "$out" --events "$results/events.jsonl"
fi
if [ -d "$src" ]; then
    step verify.json kizami verify "$out" --against "$src"
else
    echo "pipeline.sh: $src is on the Hub: $out is verified, and not compared with the source's weights" >&2
    step verify.json kizami verify "$out"
fi
kizami check "$out" --engine "${ENGINE:-sglang}" --tp "${TP:-1}"
kizami report "$out" --format markdown -o "$results/summary.md"
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    cat "$results/summary.md" >> "$GITHUB_STEP_SUMMARY"
fi
kizami report "$out" --max-rel-error "${MAX_REL_ERROR:-0.12}" --format junit -o "$results/report.xml"
if [ -n "$repo" ]; then
    kizami push "$out" "$repo"
fi
