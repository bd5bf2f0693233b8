#!/bin/sh
# Builds the kernels with sanitizers, without PyTorch, and runs driver.cpp on them. Usage: sanitize.sh [folder] [flags]
# The flag -DDRAFTSMITH_EMULATED_TILES computes tiles in C++, so that their code is tested on any processor.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../src/draftsmith/native/csrc
folder=${1:-$(mktemp -d)}
[ $# -eq 0 ] || shift
compiler=${CXX:-g++}
objects=""
for file in "$here/driver.cpp" "$source/dispatch.cpp" "$source"/kernels_*.cpp; do
  object=$folder/$(basename "$file" .cpp).o
  "$compiler" -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
    -Wno-unknown-pragmas -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -fno-math-errno -fno-trapping-math \
    "$@" -I"$source" -c "$file" -o "$object"
  objects="$objects $object"
done
# shellcheck disable=SC2086
"$compiler" -fsanitize=address,undefined $objects -o "$folder/driver"
"$folder/driver"
