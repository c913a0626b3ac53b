/* 8 KiB of initial-exec TLS in a library that a program opens with dlopen, and in one that it links. */
#include <pthread.h>
static __thread __attribute__((tls_model("initial-exec"))) unsigned char block[BYTES];
static void *sum(void *unused) {
    long total = 0;
    (void)unused;
    for (int i = 0; i < BYTES; i++) block[i] = (unsigned char)i;
    for (int i = 0; i < BYTES; i++) total += block[i];
    return (void *)total;
}
long sum_in_thread(void) {
    pthread_t thread;
    void *total;
    pthread_create(&thread, 0, sum, 0);
    pthread_join(thread, &total);
    return (long)total + (long)sum(0);
}
