#!/usr/bin/env bash
# Whether a libtessera.so exports what the header declares, each with a version, and nothing else.
#   check_symbols.sh LIBRARY HEADER
set -euo pipefail
export LC_ALL=C # other orders do not compare all characters one by one
exported=$(nm -D --defined-only "$1" | awk '$2 != "A" { print $3 }' | sort)
unversioned=$(grep -v '@@TESSERA_' <<<"$exported" || true)
[[ -z $unversioned ]] || { echo "symbols without a version: $unversioned" >&2; exit 1; }
declared=$(sed 's|//.*||' "$2" | grep -oE '\btessera_[a-z_]+\(' | tr -d '(' | sort -u)
diff <(sed 's/@@.*//' <<<"$exported") <(echo "$declared") || { echo "left: exported, right: declared" >&2; exit 1; }
