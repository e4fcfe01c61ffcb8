#!/bin/sh
# Convert, prove, judge, publish: what the GitHub action, the GitLab job, the container and the Slurm job run.
#
#   pipeline.sh SRC OUT [REPO]
#
# SRC: a folder, or org/name[@revision] on the Hub. REPO: where a good result goes (HF_TOKEN in the environment).
# Each step is an exit code: the first one that is not 0 ends it, and nothing is pushed. Run again, it resumes.
# RESULTS (default results): plan.json, convert.json, events.jsonl, verify.json, report.xml (JUnit), summary.md.
# ENGINE, TP: who will serve it. MAX_REL_ERROR: the limit of each tensor. Every option of kizami can be set as a
# variable, too: KIZAMI_GROUP_SIZE=64.
set -eu

src=$1
out=$2
repo=${3:-}
results=${RESULTS:-results}
mkdir -p "$results"

kizami plan "$src" --json > "$results/plan.json"
if [ ! -e "$out/kizami.json" ]; then
    kizami convert "$src" "$out" --events "$results/events.jsonl" --json > "$results/convert.json"
fi
if [ -d "$src" ]; then # the proof needs the source's weights
    kizami verify "$out" --against "$src" --json > "$results/verify.json"
else
    kizami verify "$out" --json > "$results/verify.json"
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
