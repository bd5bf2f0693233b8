#!/bin/sh
# Builds the kernels with sanitizers, without PyTorch, and runs driver.cpp on them. Usage: sanitize.sh [folder]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../src/draftsmith/native/csrc
folder=${1:-$(mktemp -d)}
compiler=${CXX:-g++}
objects=""
for file in "$here/driver.cpp" "$source/dispatch.cpp" "$source"/kernels_*.cpp; do
  object=$folder/$(basename "$file" .cpp).o
  "$compiler" -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
    -Wno-unknown-pragmas -Wno-uninitialized -Wno-maybe-uninitialized -fno-math-errno -fno-trapping-math \
    -I"$source" -c "$file" -o "$object"
  objects="$objects $object"
done
# shellcheck disable=SC2086
"$compiler" -fsanitize=address,undefined $objects -o "$folder/driver"
"$folder/driver"
