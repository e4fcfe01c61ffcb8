#!/bin/sh
# Convert, judge, prove, publish: what the GitHub action, the GitLab job, the container and the Slurm job run.
#
#   pipeline.sh SRC OUT [REPO]
#
# SRC: a folder, or org/name[@revision] on the Hub. REPO: where a good result goes (HF_TOKEN in the environment). It is
# looked at last: name a new repository, or the one of this very output.
# Steps: plan, convert, report (the limits), check, verify, push. Each is an exit code: the first one that is not 0 ends
# it, and nothing is pushed. Run again, it resumes. An OUT that is there must be of this source, of the commit that the
# Hub has now, and of these settings: kizami plan --finished says so from OUT/kizami.json.
# The proof compares every tensor with the source: it needs SRC on the disk, or whole in the Hub's cache (hf download).
# Of a SRC that is on the Hub alone files and structure of OUT are verified, and its figures are those of the run; the
# script says so.
# RESULTS (default results): plan.json, convert.json, events.jsonl, verify.json, report.xml (JUnit), summary.md.
# ENGINE (sglang), TP (1): who will serve it. MAX_REL_ERROR (0.12): the limit of each tensor. KIZAMI_PRIVATE=1: a new
# REPO is private. Options of kizami that the script itself does not give can be set as variables: KIZAMI_GROUP_SIZE=64.
# SIGTERM and SIGINT go on to the command at work, and the script ends when that has ended.
set -eu

say() {
    printf 'pipeline.sh: %s\n' "$*" >&2
}

if [ $# -lt 2 ] || [ $# -gt 3 ] || [ -z "$1" ] || [ -z "$2" ]; then
    say "usage: pipeline.sh SRC OUT [REPO]"
    exit 2
fi
for name in "$@" "${RESULTS:-}"; do
    case $name in
        -*) say "$name begins like an option: write ./$name for a folder of that name"; exit 2 ;;
    esac
done
src=$1
out=$2
repo=${3:-}
results=${RESULTS:-results}
engine=${ENGINE:-${KIZAMI_ENGINE:-sglang}}
tp=${TP:-${KIZAMI_TP:-1}}
limit=${MAX_REL_ERROR:-${KIZAMI_MAX_REL_ERROR:-0.12}}
if [ -n "${KIZAMI_DRY_RUN:-}${KIZAMI_SHARDS:-}" ]; then
    say "KIZAMI_DRY_RUN and KIZAMI_SHARDS give no OUT: they are for kizami convert alone"
    exit 2
fi
if [ -n "${KIZAMI_PUSH_TO:-}${KIZAMI_DELETE_PUSHED:-}" ]; then
    say "KIZAMI_PUSH_TO and KIZAMI_DELETE_PUSHED push before anything is proven: REPO is the third argument here"
    exit 2
fi
if ! printf '%s\n' "$limit" | grep -Eqx '[+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]{1,2})?'; then
    say "MAX_REL_ERROR is $limit, expected a number such as 0.12"
    exit 2
fi
private=${KIZAMI_PRIVATE:-}
unset KIZAMI_PRIVATE KIZAMI_JSON KIZAMI_QUIET KIZAMI_OUTPUT # of commands that are run here in another way
mkdir -p "$results"
for name in plan.json verify.json report.xml summary.md; do
    rm -f "$results/$name" # of an earlier run
done
[ -e "$out/kizami.json" ] || rm -f "$results/convert.json" # of another OUT

fail() { # fail NAME CODE
    case $2 in
        130 | 143) say "$1: interrupted, exit code $2; the same command goes on" ;;
        *) say "FAILED: $1, exit code $2" ;;
    esac
    exit "$2"
}

child=
stopped= # the exit code of a signal to this script
run() { # run COMMAND...: its exit code. With a command in front of it a shell hears of no signal before that has ended
    [ -z "$stopped" ] || return "$stopped"
    "$@" &
    child=$!
    if [ -n "$stopped" ]; then # by a signal while it was started: once more when it has become the command
        kill -TERM "$child" 2> /dev/null || :
        sleep 1
        kill -TERM "$child" 2> /dev/null || :
    fi
    ended=0
    wait "$child" || ended=$?
    while kill -0 "$child" 2> /dev/null; do # a signal ends `wait` too
        ended=0
        wait "$child" || ended=$?
    done
    child=
    return "${stopped:-$ended}" # also where the command had its last word already
}
stop() { # stop CODE
    stopped=$1
    [ -z "$child" ] || kill -TERM "$child" 2> /dev/null || :
}
trap 'stop 143' TERM
trap 'stop 130' INT

on_the_hub_alone() { # whether verify has just found none of SRC's weights, or not all of them
    [ ! -e "$src" ] && grep -q '"kizami.error/1"' "$results/verify.json" 2> /dev/null &&
        grep -Eq '"(not_in_cache|missing_file|dangling_link)"' "$results/verify.json"
}

step() { # step NAME COMMAND...: its object goes to NAME.json; code: how it ended. What it says of a failure is shown
    name=$1
    shift
    code=0
    run "$@" --json > "$results/$name.json" || code=$?
    if [ "$code" -eq 0 ] || on_the_hub_alone; then
        return 0
    fi
    if [ "$name" = verify ] || grep -q '"kizami.error/1"' "$results/$name.json"; then
        head -n 60 "$results/$name.json" >&2 # plan has said why, report will say of convert; their objects are long
    fi
}

judge() { # code: 1 if a limit is missed; the files are there in any case
    code=0
    set --
    if [ -n "${KIZAMI_STATS:-}" ]; then
        set -- --against "$src" # the errors of outputs need it
    fi
    run kizami report "$out" "$@" --max-rel-error "$limit" --format junit -o "$results/report.xml" || code=$?
    run env KIZAMI_MAX_REL_ERROR="" KIZAMI_MIN_SQNR="" KIZAMI_MAX_OUTPUT_ERROR="" \
        kizami report "$out" "$@" --format markdown -o "$results/summary.md" || code=$?
    if [ -n "${GITHUB_STEP_SUMMARY:-}" ] && [ -e "$results/summary.md" ]; then
        cat "$results/summary.md" >> "$GITHUB_STEP_SUMMARY"
    fi
}

set -- --engine "$engine"
if [ -n "${KIZAMI_EP:-}${KIZAMI_PP:-}" ]; then
    set -- # plan knows of TP alone, check knows all three
fi
step plan kizami plan "$src" --finished "$out" --tp "$tp" "$@"
[ "$code" -eq 0 ] || fail plan "$code"
say "plan: ok"

if [ -e "$out/kizami.json" ] && [ ! -e "$out/.kizami" ]; then
    say "convert: $out is there, of this source and these settings"
else
    step convert kizami convert "$src" "$out" --events "$results/events.jsonl"
    converted=$code
    if [ "$converted" -eq 1 ] && [ -e "$out/kizami.json" ]; then
        judge # a limit of its own is missed
    fi
    [ "$converted" -eq 0 ] || fail convert "$converted"
    say "convert: ok"
fi

judge
[ "$code" -eq 0 ] || fail report "$code"
say "report: ok, limit $limit"

run kizami check "$out" --engine "$engine" --tp "$tp" || fail check $?
say "check: ok"

source=$src
if [ ! -e "$src" ]; then # of the commit that it was made of
    source=${src%@*}@$(sed -n 's/.*"commit": "\([0-9a-f]*\)".*/\1/p' "$results/plan.json" | head -n 1)
fi
step verify kizami verify "$out" --against "$source"
if [ "$code" -ne 0 ] && on_the_hub_alone; then
    step verify kizami verify "$out"
fi
[ "$code" -eq 0 ] || fail verify "$code"
compared=$(sed -n 's/.*"tensors against the source": \([0-9]*\).*/\1/p' "$results/verify.json")
if [ -n "$compared" ]; then
    proven="$compared tensors held to the source"
else
    proven="files and structure verified, no weight compared: $src is on the Hub alone"
fi
say "verify: ok, $proven"

[ -z "$stopped" ] || fail "before the end" "$stopped"
if [ -n "$repo" ]; then
    KIZAMI_PRIVATE=$private
    export KIZAMI_PRIVATE
    run kizami push "$out" "$repo" || fail push $?
    say "push: ok"
fi
say "DONE: $out: $proven; $engine loads it at tp $tp; ${repo:+pushed to }${repo:-no REPO, nothing pushed}"
