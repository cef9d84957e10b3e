#!/bin/bash
# Creates the environment of this code once. Environments of other code are not changed.
set -eu
cd "$(dirname "$0")"
env=env-$(cat pins.txt @wheel@ | sha256sum | cut -c1-12)
if ! [[ -e "$env/made" ]]; then
  uv venv --quiet --clear --python @python@ "$env"
  uv pip install --quiet --python "$env/bin/python" --no-deps --require-hashes --requirements pins.txt
  uv pip install --quiet --python "$env/bin/python" --no-deps @wheel@
  touch "$env/made"
fi
ln -sfn "$env" env
