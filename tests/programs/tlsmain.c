#include <stdio.h>
long sum_in_thread(void);
int main(void) { printf("%ld\n", sum_in_thread()); return 0; }
