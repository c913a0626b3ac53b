/* A matrix by a vector in Distributed Large Memory: the sample of its paper. cc -O2 -o matvec matvec.c
 *
 *   hpcrt exec --memory node[2-3]:2G --local-mb 500 -- ./matvec 16384 */
#include <stdio.h>

#include "dlm.h"

int main(int argc, char *argv[])
{
    size_t n, i, j;
    double *a, *x, *y, sum = 0;
    dlm_startup(&argc, &argv);
    n = argc > 1 ? strtoul(argv[1], NULL, 10) : 16384;
    a = dlm_alloc(n * n * sizeof *a);
    x = dlm_alloc(n * sizeof *x);
    y = dlm_alloc(n * sizeof *y);
    if (!a || !x || !y) {
        perror("dlm_alloc");
        return 1;
    }
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++)
            a[i * n + j] = i;
    for (i = 0; i < n; i++)
        x[i] = i;
    for (i = 0; i < n; i++)
        for (j = 0; j < n; j++)
            y[i] += a[i * n + j] * x[j];
    for (i = 0; i < n; i++)
        sum += y[i];
    printf("%.0f\n", sum);
    dlm_free(a);
    dlm_free(x);
    dlm_free(y);
    dlm_shutdown();
    return 0;
}
