#!/usr/bin/env bash
# Names what is missing before anything is installed. Argument: the Python interpreter that was found, or nothing.
set -u
python=${1:-}
missing=()

if [ -z "$python" ] || ! version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null); then
    missing+=("Python 3.11 or newer${python:+; $python does not run} (set PYTHON=/path/to/python)")
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    missing+=("Python 3.11 or newer; $python is $version (set PYTHON=/path/to/python)")
else
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=("Python's venv module (Debian: apt-get install python3-venv)")
    header=$("$python" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))')
    [ -f "$header" ] || missing+=("Python's headers, $header (Debian: apt-get install python3-dev)")
fi

compiler=${CXX:-c++}
if ! command -v "$compiler" >/dev/null; then
    missing+=("a C++20 compiler, $compiler (Debian: apt-get install g++; or set CXX)")
elif ! echo 'int main() {}' | "$compiler" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    missing+=("a C++20 compiler; $compiler does not know -std=c++20 (GCC 11 or Clang 14 will do)")
fi

if [ ${#missing[@]} -gt 0 ]; then
    printf 'Tandem cannot be set up; missing:\n' >&2
    printf '  - %s\n' "${missing[@]}" >&2
    exit 1
fi
