#!/bin/bash
# Installs the code and starts the run at every boot. run.sh contains the values of --env, so only root can read it.
set -eu
umask 077
export HOME=/root
mkdir -p @folder@
gcloud storage rsync --recursive @code@ @folder@
command -v uv > /dev/null || python3 -m pip install --quiet uv
bash @folder@/install.sh
cp @folder@/sinklab.service /run/systemd/system/
systemctl daemon-reload
systemctl start --no-block sinklab
