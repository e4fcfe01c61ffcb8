#!/bin/sh
#SBATCH --job-name=kizami-shards
#SBATCH --array=1-8
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=8G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# kizami plan /data/GLM-5.2-FP8 --json    (output.shards is SHARDS)
# sbatch examples/pipelines/slurm-array.sh /data/GLM-5.2-FP8 /data/GLM-5.2-INT4 SHARDS
# sbatch --dependency=afterany:JOB examples/pipelines/slurm.sh /data/GLM-5.2-FP8 /data/GLM-5.2-INT4
#
# Each task of the array converts its share of the shards; all see /data. A task that is requeued goes on from its
# finished shards. The job that follows converts what failed tasks have left, finishes and proves. Options are variables,
# the same for both: KIZAMI_GROUP_SIZE=64. Threads are the cores that Slurm gives, which srun does not take from sbatch.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
set -eu

src=$1
out=$2
shards=$3
tasks=$SLURM_ARRAY_TASK_COUNT
task=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))
first=$((task * shards / tasks + 1))
last=$(((task + 1) * shards / tasks))
if [ "$first" -gt "$last" ]; then
    exit 0 # more tasks than shards
fi
srun kizami convert "$src" "$out" --shards "$first-$last/$shards"
