#!/usr/bin/env bash
#
# Rotates log files: file.log becomes file.log.1.gz, what was .1.gz becomes .2.gz, and so on.
#
# Usage: rotate_logs.sh [-n KEEP] [-s SIZE] [-d] FILE...

set -euo pipefail

keep=5
min_bytes=$((1024 * 1024))
dry_run=false

usage() {
    cat <<'USAGE'
Usage: rotate_logs.sh [options] FILE...

Options:
  -n KEEP   how many old files to keep (default: 5)
  -s SIZE   rotate only files of at least SIZE, such as 500K or 10M (default: 1M)
  -d        say what would be done, and do nothing
  -h        show this help
USAGE
}

log() {
    printf '%s %s\n' "$(date '+%H:%M:%S')" "$*" >&2
}

die() {
    log "error: $*"
    exit 1
}

run() {
    if "$dry_run"; then
        log "would run: $*"
    else
        "$@"
    fi
}

parse_size() {
    local text=$1 number unit
    number=${text%[KMGkmg]}
    unit=${text#"$number"}
    [[ $number =~ ^[0-9]+$ ]] || die "not a size: $text"
    case $unit in
        '') echo "$number" ;;
        [Kk]) echo $((number * 1024)) ;;
        [Mm]) echo $((number * 1024 * 1024)) ;;
        [Gg]) echo $((number * 1024 * 1024 * 1024)) ;;
    esac
}

file_bytes() {
    # GNU and BSD spell this differently.
    stat -c %s "$1" 2>/dev/null || stat -f %z "$1"
}

shift_old_files() {
    local file=$1 n
    if [[ -e $file.$keep.gz ]]; then
        run rm -f -- "$file.$keep.gz"
    fi
    for ((n = keep - 1; n >= 1; n--)); do
        if [[ -e $file.$n.gz ]]; then
            run mv -- "$file.$n.gz" "$file.$((n + 1)).gz"
        fi
    done
}

rotate() {
    local file=$1 size temporary
    if [[ ! -f $file ]]; then
        log "skip $file: not a plain file"
        return 0
    fi
    size=$(file_bytes "$file")
    if ((size < min_bytes)); then
        log "skip $file: $size bytes are fewer than $min_bytes"
        return 0
    fi
    shift_old_files "$file"
    if "$dry_run"; then
        log "would compress $file to $file.1.gz"
        return 0
    fi
    # The writer keeps its file open, so it is copied and emptied, not moved.
    temporary=$(mktemp "$file.XXXXXX")
    trap 'rm -f -- "$temporary"' RETURN
    cp -p -- "$file" "$temporary"
    : >"$file"
    gzip -9 -c -- "$temporary" >"$file.1.gz"
    log "rotated $file: $size bytes, now $(file_bytes "$file.1.gz") compressed"
}

main() {
    local option file status=0
    while getopts ':n:s:dh' option; do
        case $option in
            n) keep=$OPTARG ;;
            s) min_bytes=$(parse_size "$OPTARG") ;;
            d) dry_run=true ;;
            h)
                usage
                exit 0
                ;;
            :) die "-$OPTARG needs a value" ;;
            *) die "unknown option: -$OPTARG" ;;
        esac
    done
    shift $((OPTIND - 1))
    (($# > 0)) || { usage >&2; exit 2; }
    [[ $keep =~ ^[1-9][0-9]*$ ]] || die "-n needs a positive number, got $keep"
    for file in "$@"; do
        rotate "$file" || status=1
    done
    exit "$status"
}

main "$@"
