/* Ranks write small pieces by turns into one file, by system calls and through MPI, and rank 0 reads them. */
#include <fcntl.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define COUNT 3000

static void check(int good, const char *what) {
    if (good) return;
    perror(what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

int main(int count, char **words) {
    int rank, size, shared, own;
    char name[4096];
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    snprintf(name, sizeof name, "%s.%d", words[1], rank);
    check((shared = open(words[1], O_RDWR | O_CREAT, 0644)) >= 0, "open");
    check((own = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644)) >= 0, "open");
    for (uint64_t n = 0; n < COUNT; n++) {
        uint64_t number = n * size + rank;
        check(pwrite(shared, &number, 8, number * 8) == 8, "pwrite");
        check(write(own, &number, 8) == 8, "write");
    }
    MPI_File file;
    snprintf(name, sizeof name, "%s.mpi", words[1]);
    check(MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file) == MPI_SUCCESS, "MPI_File_open");
    for (uint64_t n = 0; n < 5; n++) {
        uint64_t number = n * size + rank;
        check(MPI_File_write_at_all(file, number * 8, &number, 1, MPI_UINT64_T, MPI_STATUS_IGNORE) == MPI_SUCCESS, "write_at_all");
    }
    check(MPI_File_close(&file) == MPI_SUCCESS, "MPI_File_close");
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        int through = open(name, O_RDONLY);
        for (uint64_t n = 0, found; n < (uint64_t)COUNT * size; n++) {
            check(pread(shared, &found, 8, n * 8) == 8 && found == n, words[1]);
            if (n < 5u * size) check(pread(through, &found, 8, n * 8) == 8 && found == n, name);
        }
    }
    check(close(own) == 0 && close(shared) == 0, "close");
    snprintf(name, sizeof name, "%s.%d", words[1], rank);
    check((own = open(name, O_RDONLY)) >= 0, "open");
    for (uint64_t n = 0, found; n < COUNT; n++) check(read(own, &found, 8) == 8 && found == n * size + rank, name);
    MPI_Finalize();
    if (rank == 0) printf("right\n");
    return 0;
}
