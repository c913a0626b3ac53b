#!/bin/bash
# Ranks talk to each other through hpcrt, without MPI: docs/COLLECTIVES.md.
#   hpcrt exec --hosts 'n[1-4]' -n 8 -- bash examples/collectives.sh
LC_ALL=C # lengths are bytes

# call VERB [ITEM]...: sends a request; the items of its reply are in ${reply[@]}.
call() {
    local verb=$1 item status count length
    shift
    { printf '%s %d\n' "$verb" $#; for item; do printf '%d\n%s' ${#item} "$item"; done; } >&$HPCRT_FD
    read -r status count <&$HPCRT_FD
    reply=()
    [ "$status" = ok ] || { echo "$verb: $status $count" >&2; return 1; }
    for ((; count > 0; count--)); do
        read -r length <&$HPCRT_FD
        item=
        ((length == 0)) || IFS= read -r -N "$length" item <&$HPCRT_FD
        reply+=("$item")
    done
}

if ((HPCRT_RANK == 0)); then call broadcast "a word from rank 0"; else call broadcast; fi
word=${reply[0]}
call gather "rank $HPCRT_RANK on $HPCRT_HOST"
((HPCRT_RANK)) || printf '%s\n' "${reply[@]}"
call put "key-$HPCRT_RANK" "value of $HPCRT_RANK"
call barrier
call get "key-$(((HPCRT_RANK + 1) % HPCRT_SIZE))"
echo "$HPCRT_RANK: $word, ${reply[0]}"
