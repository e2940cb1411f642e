#!/bin/bash
# A batch job on eight cards of a Slurm cluster, one shard of the prompts for each:
#
#   sbatch slurm_array.sh MODEL prompts.jsonl answers.jsonl [more options of pagedkv generate]
#
# Answers go to answers-00000-of-00008.jsonl to answers-00007-of-00008.jsonl. After a time limit or a
# lost machine submit the same again: what is answered stays, what is missing is computed.

#SBATCH --job-name=answers
#SBATCH --array=0-7
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=answers-%A-%a.log

set -euo pipefail
if (($# < 3)); then
  echo "slurm_array.sh: expected MODEL, a file of prompts, and the file for the answers" >&2
  exit 2
fi
# `exec`, so that the signals of Slurm reach the command: it ends at once with whole rows.
exec pagedkv generate "$1" --file "$2" --out "$3" --shard slurm "${@:4}"
