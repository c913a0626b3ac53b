#!/bin/sh
# Children from outside and from the captured tree, each as a program starts them.
set -e
here=$(dirname "$0")
"$here/dynamic" child
ssh -G localhost | head -1
work=$(mktemp -d)
cd "$work"
git init -q repo
(cd repo && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first && git log --format=%s)
rsync -a "$here/../lib/" copied/
cmp copied/libpart.so "$here/../lib/libpart.so"
ls copied
cd /
rm -rf "$work"
