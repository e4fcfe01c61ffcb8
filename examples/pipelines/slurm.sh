#!/bin/sh
#SBATCH --job-name=kizami
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=8G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# sbatch examples/pipelines/slurm.sh /data/GLM-5.2-FP8 /data/GLM-5.2-INT4 [REPO]
#
# Slurm sends SIGTERM to the step two minutes before its time is over, and whenever the job is requeued: kizami stops
# within seconds, and the same job goes on from the finished shards. A job that was requeued starts by itself; one whose
# time is over does not: submit it again. Its threads are the cores that Slurm gives, and since 22.05 srun does not take
# their number from sbatch.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
srun sh "${KIZAMI_PIPELINE:-examples/pipelines/pipeline.sh}" "$@"
