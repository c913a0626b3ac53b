/* Says what a rank knows; `abort`: the last one ends the job; `wait`: it does not end. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int rank, size, sum, local_size, *app, set, from[64] = {0}, to[64];
    char host[256];
    MPI_Comm local;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
    MPI_Comm_size(local, &local_size);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &app, &set);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    /* All have connections to close. */
    for (int round = 0; round < 3; round++) {
        MPI_Alltoall(from, 1, MPI_INT, to, 1, MPI_INT, MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    gethostname(host, sizeof host);
    if (argc > 1 && strcmp(argv[1], "abort") == 0 && rank == size - 1) MPI_Abort(MPI_COMM_WORLD, 7);
    if (argc > 1) pause();
    printf("rank %d of %d sum %d local %d app %d on %s\n", rank, size, sum, local_size, set ? *app : -1, host);
    MPI_Finalize();
    return 0;
}
