# relinked.sh HPCRT: a session with the audit view, in an empty directory. Prints what programs find that are linked anew, or whose libraries come
# into directories that are searched earlier, between jobs and within them.
set -e
hpcrt=$1
here=$PWD
mkdir -p lib alt first cwd/mylib
link() { cc -o main main.c -L"$1" -lf -Wl,-rpath,"$here/first:$here/$1"; }
echo 'int f(void) { return 1; }' | cc -shared -fPIC -xc -o lib/libf.so -
echo 'int f(void) { return 2; }' | cc -shared -fPIC -xc -o alt/libf.so -
printf '#include <stdio.h>\nint f(void);\nint main(void) { printf("%%d\\n", f()); }\n' > main.c
cc -o relative main.c -Llib -lf -Wl,-rpath,"./mylib:$here/lib"
cp alt/libf.so cwd/mylib
link lib
session=$("$hpcrt" session start --agent local --hosts a --view audit)
trap '"$hpcrt" session stop $session' EXIT
# What changes within a job is seen some milliseconds later.
soon='n=0; until [ "$(./main)" = 2 ] || [ $n = 100 ]; do n=$((n + 1)); sleep 0.1; done; ./main'
late='n=0; until [ "$(./main)" = 1 ] || [ $n = 100 ]; do n=$((n + 1)); sleep 0.1; done; ./main'
run() { echo "$(echo $("$hpcrt" session run $session -q --prefix "$here" "$@"))"; }
run -- sh -c ./main
link alt
run -- sh -c ./main
link lib
run -- sh -c "./main; rm main; cc -o main main.c -Lalt -lf -Wl,-rpath,$here/alt; $soon"
link lib
run -- sh -c "./main; rm main; cc -o main main.c -Lalt -lf -Wl,-rpath,$here/alt; $soon; rm main; cc -o main main.c -Llib -lf -Wl,-rpath,$here/lib; $late"
link lib
run -- sh -c ./main
cp alt/libf.so first
run -- sh -c ./main
rm first/libf.so
run -- sh -c "./main; cp alt/libf.so first; $soon"
rm first/libf.so
run -x LD_PRELOAD="$here/alt/libf.so" -- ./main
run -- sh -c ./main
run -- sh -c "./relative; cd cwd && ../relative"
