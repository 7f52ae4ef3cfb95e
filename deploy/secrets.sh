#!/usr/bin/env bash
# Makes the secrets of docker-compose.yml, once: random, readable in the containers, kept out of the tree by .gitignore.
set -euo pipefail
umask 077
dir=${1:-$(dirname "$0")/secrets}
mkdir -p "$dir"
random() { python3 -c 'import secrets; print(secrets.token_urlsafe(32), end="")'; }
make() { # takes standard input, never over a secret that is in use
    if [[ -s $dir/$1 ]]; then cat >/dev/null; else cat >"$dir/$1" && chmod 0444 "$dir/$1"; fi
}

random | make kvguard_read_token
random | make kvguard_ingest_token
random | make kvguard_admin_token
random | make grafana_admin_password
random | make redis_password
printf '%s\n' \
    "prometheus read $(<"$dir/kvguard_read_token")" \
    "hooks ingest $(<"$dir/kvguard_ingest_token")" \
    "operator read,admin $(<"$dir/kvguard_admin_token")" | make kvguard_tokens
printf 'user default on >%s ~* &* +@all -@dangerous +info +flushdb\n' "$(<"$dir/redis_password")" | make redis_acl
echo "secrets in $dir"
