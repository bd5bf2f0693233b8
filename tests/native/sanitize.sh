#!/bin/sh
# Builds the kernels with sanitizers, without PyTorch, and runs driver.cpp on them. Usage: sanitize.sh [folder]
# The driver runs twice: on what this processor has, and on tiles that C++ computes, so that their code is tested on any one.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../src/draftsmith/native/csrc
folder=${1:-$(mktemp -d)}
compiler=${CXX:-g++}
# Newer compilers check use after return, on a stack of the sanitizer's own, where reading a wide vector crashed (GCC 13).
# Without it, all compilers check the same.
ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=0}
export ASAN_OPTIONS
sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=all"

compile() {  # from, to, flags
  from=$1 to=$2
  shift 2
  "$compiler" -std=c++20 -O1 -g1 -fno-omit-frame-pointer -Wno-unknown-pragmas -Wno-psabi -Wno-uninitialized \
    -Wno-maybe-uninitialized -fno-math-errno -fno-trapping-math -ffp-contract=off "$@" -I"$source" -c "$from" -o "$folder/$to.o"
}

link() {  # to, from
  to=$1
  shift
  # The driver comes last: of a function that is in several objects, the first is taken, and that of a kernel is checked.
  # shellcheck disable=SC2086
  (cd "$folder" && "$compiler" $sanitizers dispatch.o kernels_portable.o kernels_avx*.o "$@" driver.o -o "$to")
}

# shellcheck disable=SC2086
"$compiler" $sanitizers -std=c++17 -g1 -I"$source" "$here/crew.cpp" "$source/crew.cpp" -o "$folder/crew"
"$folder/crew"
# shellcheck disable=SC2086
"$compiler" $sanitizers -std=c++17 -g1 -I"$source" "$here/ngrams.cpp" -o "$folder/ngrams"
"$folder/ngrams"
# Twice: a program is watched for what it touches, or for what its threads do at the same time, where that works here.
watch() {
  "$compiler" -fsanitize="$1" -fno-sanitize-recover=all -std=c++20 -g1 -pthread -I"$source" "$2" "$source/crew.cpp" \
    -o "$folder/watched"
}
watch address,undefined "$here/pieces.cpp"
"$folder/watched"
echo "int main() {}" > "$folder/empty.cpp"
if watch thread "$folder/empty.cpp" 2> "$folder/said" && "$folder/watched" 2> "$folder/said"; then
  watch thread "$here/pieces.cpp"
  "$folder/watched"
fi
# The driver is no kernel; what it allocates is watched all the same.
compile "$here/driver.cpp" driver
for file in "$source/dispatch.cpp" "$source"/kernels_*.cpp; do
  name=$(basename "$file" .cpp)
  # The largest blocks of registers of all: to optimise them takes longer than to run them as they are.
  if [ "$name" = kernels_avx512bf16 ]; then slow=-O0; else slow=-O1; fi
  # shellcheck disable=SC2086
  compile "$file" "$name" $sanitizers $slow
done
# shellcheck disable=SC2086
compile "$source/kernels_amx.cpp" emulated $sanitizers -DDRAFTSMITH_EMULATED_TILES
link driver kernels_amx.o
link emulated emulated.o
"$folder/driver"
"$folder/emulated" amx
