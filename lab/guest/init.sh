#!/bin/busybox sh
# First program of the guest: takes the host's root by 9p, read-only under a RAM overlay, and runs $RUN there.
busybox() { /bin/busybox "$@"; }
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
for module in virtio_pci 9pnet_virtio 9p overlay crc32_generic crc32c_generic libcrc32c rdma_rxe ib_uverbs rdma_ucm siw sch_netem veth tcp_diag; do
    busybox modprobe "$module" || echo "modprobe $module failed"
done
busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 hostroot /host || echo "no host root"
busybox mount -t tmpfs upper /upper
busybox mkdir /upper/upper /upper/work
busybox mount -t overlay -o lowerdir=/host,upperdir=/upper/upper,workdir=/upper/work root /root
for folder in proc sys dev; do busybox mount -o move "/$folder" "/root/$folder"; done
busybox mount -t tmpfs run /root/run
busybox mkdir -p /root/dev/shm /root/run/out
busybox mount -t tmpfs shm /root/dev/shm
busybox mount -t 9p -o trans=virtio,version=9p2000.L,cache=none out /root/run/out || echo "no output share"
exec /bin/busybox switch_root /root /bin/sh "$RUN"
