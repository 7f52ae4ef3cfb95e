/* tundelay: a slow wire between two network namespaces.
 *
 *     tundelay CONTROL_SOCKET NEAR_ADDRESS FAR_ADDRESS MTU
 *
 * The "near" namespace is the one it is started in; the "far" one it makes itself, and its id is printed as
 * "ready PID TID": /proc/PID/task/TID/ns/net opens it. Each gets a TUN device named "lab0" with its address (IPv4, /30).
 * Every IP packet that enters one device leaves the other after RTT/2, so the kernel's own round-trip estimate, ping
 * and every protocol see the delay alike. When the process ends, devices and far namespace are gone: nothing to clean.
 *
 * Control: one datagram per command to the Unix socket CONTROL_SOCKET, answered with the present state as key=value:
 *     rtt US    round-trip time added, microseconds      bw MBPS   limit per direction, megabits/s, 0 = none
 *     loss PPM  packets dropped per million              reset     counters to zero            stats   only answer
 *
 * Four threads move packets: each direction has a reader, which stamps packets with their due time and queues them, and
 * a writer, which sleeps until a packet is due and writes it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PACKET = 65536, MAX_QUEUED_BYTES = 64 << 20 };

static atomic_long rtt_us, bytes_per_second, loss_ppm;
static atomic_long packets[2], bytes[2], drops; /* [0] near -> far, [1] far -> near */

struct packet {
    struct packet *next;
    long long due_ns;
    int length;
    unsigned char data[];
};

struct direction {
    int index, from, to;
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct packet *head, *tail;
    long queued_bytes;
    long long wire_free_ns; /* when the last queued packet has left the (bandwidth-limited) wire */
};

static void die(const char *what) {
    perror(what);
    exit(1);
}

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* A TUN device in the present namespace, up and with its address. */
static int make_tun(const char *address, int mtu) {
    int tun = open("/dev/net/tun", O_RDWR);
    if (tun < 0) die("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, "lab0");
    if (ioctl(tun, TUNSETIFF, &request)) die("TUNSETIFF");

    int socket_fd = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
    in->sin_family = AF_INET;
    if (inet_pton(AF_INET, address, &in->sin_addr) != 1) die(address);
    if (ioctl(socket_fd, SIOCSIFADDR, &request)) die("SIOCSIFADDR");
    in->sin_addr.s_addr = htonl(0xfffffffcU);
    if (ioctl(socket_fd, SIOCSIFNETMASK, &request)) die("SIOCSIFNETMASK");
    request.ifr_mtu = mtu;
    if (ioctl(socket_fd, SIOCSIFMTU, &request)) die("SIOCSIFMTU");
    for (int i = 0; i < 2; i++) { /* both devices up: ours and the loopback of the namespace */
        strcpy(request.ifr_name, i ? "lo" : "lab0");
        request.ifr_flags = IFF_UP | IFF_RUNNING;
        if (ioctl(socket_fd, SIOCSIFFLAGS, &request)) die("SIOCSIFFLAGS");
    }
    close(socket_fd);
    return tun;
}

static void *reader(void *argument) {
    struct direction *d = argument;
    unsigned char buffer[MAX_PACKET];
    unsigned seed = 1 + d->index;
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        ssize_t n = read(d->from, buffer, sizeof buffer);
        if (n <= 0) {
            if (n < 0 && errno == EINTR) continue;
            die("read from TUN");
        }
        long long due = now_ns();
        packets[d->index]++;
        bytes[d->index] += n;
        if (loss_ppm && rand_r(&seed) % 1000000 < loss_ppm) {
            drops++;
            continue;
        }
        struct packet *p = malloc(sizeof *p + n);
        if (!p) die("malloc");
        pthread_mutex_lock(&d->lock);
        if (d->queued_bytes + n > MAX_QUEUED_BYTES) { /* tail drop, as a router with a full buffer does */
            pthread_mutex_unlock(&d->lock);
            free(p);
            drops++;
            continue;
        }
        if (bytes_per_second) { /* the packet starts when the wire is free and takes its own length in time */
            if (due < d->wire_free_ns) due = d->wire_free_ns;
            due += n * 1000000000LL / bytes_per_second;
            d->wire_free_ns = due;
        }
        *p = (struct packet){.due_ns = due + rtt_us * 500LL, .length = n};
        memcpy(p->data, buffer, n);
        if (d->tail) d->tail->next = p;
        else d->head = p;
        d->tail = p;
        d->queued_bytes += n;
        pthread_cond_signal(&d->filled);
        pthread_mutex_unlock(&d->lock);
    }
    return NULL;
}

static void *writer(void *argument) {
    struct direction *d = argument;
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        pthread_mutex_lock(&d->lock);
        while (!d->head) pthread_cond_wait(&d->filled, &d->lock);
        struct packet *p = d->head;
        d->head = p->next;
        if (!d->head) d->tail = NULL;
        d->queued_bytes -= p->length;
        pthread_mutex_unlock(&d->lock);

        struct timespec due = {p->due_ns / 1000000000LL, p->due_ns % 1000000000LL};
        while (p->due_ns > now_ns() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {}
        if (write(d->to, p->data, p->length) < 0) drops++;
        free(p);
    }
    return NULL;
}

static void serve_control(int control) {
    for (;;) {
        char message[256], answer[512];
        struct sockaddr_un from;
        socklen_t from_length = sizeof from;
        ssize_t n = recvfrom(control, message, sizeof message - 1, 0, (struct sockaddr *)&from, &from_length);
        if (n < 0) continue;
        message[n] = 0;
        long value;
        const char *error = "";
        if (sscanf(message, "rtt %ld", &value) == 1 && value >= 0) rtt_us = value;
        else if (sscanf(message, "bw %ld", &value) == 1 && value >= 0) bytes_per_second = value * 125000;
        else if (sscanf(message, "loss %ld", &value) == 1 && value >= 0) loss_ppm = value;
        else if (!strcmp(message, "reset")) packets[0] = packets[1] = bytes[0] = bytes[1] = drops = 0;
        else if (strcmp(message, "stats")) error = " error=unknown-command";
        int length = snprintf(answer, sizeof answer,
            "rtt_us=%ld bytes_per_second=%ld loss_ppm=%ld packets_out=%ld packets_in=%ld bytes_out=%ld bytes_in=%ld "
            "drops=%ld%s", rtt_us, bytes_per_second, loss_ppm, packets[0], packets[1], bytes[0], bytes[1], drops, error);
        if (from_length > sizeof(sa_family_t)) sendto(control, answer, length, 0, (struct sockaddr *)&from, from_length);
    }
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: tundelay CONTROL_SOCKET NEAR_ADDRESS FAR_ADDRESS MTU\n");
        return 2;
    }
    struct sockaddr_un path = {.sun_family = AF_UNIX};
    if (strlen(argv[1]) >= sizeof path.sun_path) {
        fprintf(stderr, "tundelay: control socket path is longer than %zu\n", sizeof path.sun_path - 1);
        return 2;
    }
    strcpy(path.sun_path, argv[1]);
    prctl(PR_SET_PDEATHSIG, 9); /* never outlive the lab */
    int control = socket(AF_UNIX, SOCK_DGRAM, 0);
    if (bind(control, (struct sockaddr *)&path, sizeof path)) die("bind control socket");

    int mtu = atoi(argv[4]);
    int near = make_tun(argv[2], mtu);
    if (unshare(CLONE_NEWNET)) die("unshare");
    int far = make_tun(argv[3], mtu);

    static struct direction wires[2];
    for (int i = 0; i < 2; i++) {
        wires[i].index = i;
        wires[i].from = i ? far : near;
        wires[i].to = i ? near : far;
        pthread_mutex_init(&wires[i].lock, NULL);
        pthread_cond_init(&wires[i].filled, NULL);
        pthread_t thread;
        if (pthread_create(&thread, NULL, reader, &wires[i]) || pthread_create(&thread, NULL, writer, &wires[i]))
            die("pthread_create");
    }
    printf("ready %d %ld\n", getpid(), syscall(SYS_gettid));
    fflush(stdout);
    serve_control(control);
}
