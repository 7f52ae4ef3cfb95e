#!/bin/sh
# The guest's two wires, veth pairs in one namespace: veth0-veth1 for Soft-RoCE, veth2-veth3 for Soft-iWARP (rdma_cm takes
# the first device on an interface, so each kind needs its own).
set -eu
A=10.77.0.1 B=10.77.0.2 C=10.78.0.1 D=10.78.0.2 A6=fd77::1 B6=fd77::2
ip link set lo up
ip link add veth0 type veth peer name veth1
ip link add veth2 type veth peer name veth3
for interface in all veth0 veth1 veth2 veth3; do
    echo 1 >"/proc/sys/net/ipv4/conf/$interface/accept_local"
    echo 0 >"/proc/sys/net/ipv4/conf/$interface/rp_filter"
done
ip addr add $A/24 dev veth0
ip addr add $B/24 dev veth1
ip addr add $A6/64 dev veth0 nodad
ip addr add $B6/64 dev veth1 nodad
ip addr add $C/24 dev veth2
ip addr add $D/24 dev veth3
for interface in veth0 veth1 veth2 veth3; do ip link set "$interface" up; done
# What one end's address sends to the other's must leave by the wire, though both addresses are this machine's own.
for family in -4 -6; do
    ip $family rule add pref 200 lookup local
    ip $family rule del pref 0
done
wire() { # family, own address, other address, own device, other device, table
    ip "$1" route add "$3" dev "$4" src "$2" table "$6"
    ip "$1" rule add pref 10 iif lo from "$2" to "$3" lookup "$6"
    ip "$1" neigh replace "$3" lladdr "$(cat "/sys/class/net/$5/address")" dev "$4" nud permanent
}
wire -4 $A $B veth0 veth1 100
wire -4 $B $A veth1 veth0 101
wire -4 $C $D veth2 veth3 102
wire -4 $D $C veth3 veth2 103
wire -6 $A6 $B6 veth0 veth1 100
wire -6 $B6 $A6 veth1 veth0 101
