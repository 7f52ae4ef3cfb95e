#!/bin/sh
# Runs in the guest on the host's files: the command in /run/out/command; its exit code goes to /run/out/code.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run LANG=C.UTF-8
. /run/out/environment
echo "guest: Linux $(uname -r), $(nproc) CPU, up $(cut -d' ' -f1 /proc/uptime) s"
sh "$REPOSITORY/lab/guest/network.sh" || echo "the network failed"
cd "$REPOSITORY" && sh /run/out/command
echo $? >/run/out/code
echo o >/proc/sysrq-trigger
sleep 60
