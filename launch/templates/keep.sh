#!/bin/bash
# Polls until the run ends, and creates the resource again after a preemption. The TPUs cost money until the resource
# is deleted, so the script repeats a deletion that fails. gcloud also fails for reasons that say nothing about the
# resource, such as an expired login; the script then polls again.
set -u
poll_seconds=${POLL_SECONDS:-60}
restarts_left=@restarts@

is_missing() {
  [[ $(@describe@ 2>&1) == *NOT_FOUND* ]]
}

delete_resource() {
  until @delete@ || is_missing; do
    echo 'the queued resource is not deleted, and its TPUs cost money; trying again'
    sleep "$poll_seconds"
  done
}

while true; do
  if ! state=$(@describe@) && is_missing; then
    echo 'the queued resource does not exist; create it with the verb resume'
    exit 1
  fi
  case $state in
    ACTIVE)
      unit_status=$(@query_unit@)
      if [[ $unit_status =~ StartTimestampMonotonic=[1-9] && $unit_status =~ ActiveState=(inactive|failed) ]]; then
        printf 'the run has ended\n%s\n' "$unit_status"
        delete_resource
        [[ $unit_status == *ExecMainStatus=0* ]]
        exit
      fi
      ;;
    SUSPENDED | FAILED)
      if ((restarts_left == 0)); then
        echo 'preempted more often than --restarts allows'
        exit 1
      fi
      restarts_left=$((restarts_left - 1))
      delete_resource
      @create@
      ;;
  esac
  sleep "$poll_seconds"
done
