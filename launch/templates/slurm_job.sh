#!/bin/bash
@directives@
ended=
# The signal before the time limit goes to the job steps only. A TERM to this script concerns the whole job; SLURM then
# decides whether the job runs again, so the script does not requeue it.
trap ended=1 TERM
code=0
srun --kill-on-bad-exit=0 --wait=@grace@ bash @code@/run-"${SLURM_ARRAY_TASK_ID:-0}".sh || code=$?
case $code in
  @final@) ;;
  *)
    if [[ -z "$ended" && "${SLURM_RESTART_COUNT:-0}" -lt @restarts@ ]]; then
      # SLURM requeues a job by itself after a preemption or the loss of a host, but by exit code only if the
      # administrator has set RequeueExit. The number of a job alone may be that of its whole array.
      scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    fi
    ;;
esac
exit "$code"
