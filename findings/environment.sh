# For the scripts of this folder: `environment PACKAGE...` makes a temporary folder with a fresh environment of these
# packages, which goes when the script ends. $python is its interpreter, $folder the folder.
set -euo pipefail

environment() {
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  "${PYTHON:-python3}" -m venv "$folder/environment"
  python=$folder/environment/bin/python
  "$python" -m pip --quiet --disable-pip-version-check install "$@"
}

# `ranks N` runs the program on standard input as N processes that torchrun starts. The lines of all ranks are printed in sorted order.
ranks() {
  cat >"$folder/program.py"
  # Unbuffered, Python writes the end of a line apart, and lines of two ranks mix.
  env -u PYTHONUNBUFFERED OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" "$folder/program.py" 2>"$folder/errors" |
    sort | tee "$folder/output" || { cat "$folder/errors" >&2; exit 1; }
}

# `expect` compares what was printed, in $folder/output, with standard input.
expect() {
  diff - "$folder/output" >&2 || { echo "the behaviour has changed" >&2; exit 1; }
}
