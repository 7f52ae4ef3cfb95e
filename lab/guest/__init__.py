"""A small virtual machine with RDMA in software (Soft-RoCE, Soft-iWARP) on a wire that netem can slow, for the tests.

QEMU without hardware virtualisation: the guest's clock counts instructions (`-icount`), so its microseconds do not
depend on how busy the host is.
"""
