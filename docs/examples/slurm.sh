#!/bin/bash
# sbatch docs/examples/slurm.sh SRC DST [OPTIONS of reshard]
#SBATCH --job-name=shardctl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --requeue
set -euo pipefail
source=$1 destination=$2
shift 2
# Each task is a worker and resumes where it was if the job is queued again; the last line needs no cluster.
srun shardctl reshard "$source" "$destination" --worker auto "$@"
shardctl finish "$destination"
shardctl verify "$destination"
