#!/bin/bash
# Slurm's daemons for make test-slurm: installs Debian's packages where it may, else says what to install.
set -u
missing=()
for program in munged slurmctld slurmd; do
    [[ -x $(PATH=$PATH:/usr/sbin command -v "$program") ]] || missing+=("$program")
done
((${#missing[@]} == 0)) && exit 0
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "Installing slurm-wlm and munge for ${missing[*]}."
    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends slurm-wlm munge && exit 0
fi
echo "make test-slurm needs ${missing[*]}: install Slurm and munge, on Debian as root by apt-get install slurm-wlm munge." >&2
exit 1
