#!/bin/sh
# Starts Redis, and has it read its certificates anew when the kubelet has put new ones into place.
set -eu
umask 077
here=/run/kvstrata-redis
tls=/etc/kvstrata-redis-tls
# One user more than the roles have: it may change settings and nothing else, and its password is known in this pod alone.
password=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
cp /etc/kvstrata-redis/users.acl "$here/users.acl"
echo "user reloader on >$password resetkeys resetchannels -@all +auth +hello +ping +config|set" >>"$here/users.acl"
# What the server knows: a caller that shows newer certificates than it has read would be refused.
cp "$tls/tls.crt" "$tls/tls.key" "$tls/ca.crt" "$here/"
(
  while sleep "${KVSTRATA_RELOAD_S:-30}"; do
    cmp -s "$tls/tls.crt" "$here/tls.crt" && cmp -s "$tls/ca.crt" "$here/ca.crt" && continue
    told=$(REDISCLI_AUTH=$password redis-cli --no-auth-warning --user reloader -p "${KVSTRATA_PORT:-6379}" \
      --tls --cert "$here/tls.crt" --key "$here/tls.key" --cacert "$here/ca.crt" \
      CONFIG SET tls-cert-file "$tls/tls.crt" tls-key-file "$tls/tls.key" tls-ca-cert-file "$tls/ca.crt" || true)
    echo "certificates read anew: $told"
    [ "$told" = OK ] && cp "$tls/tls.crt" "$tls/tls.key" "$tls/ca.crt" "$here/"
  done
) &
exec redis-server /etc/kvstrata-redis/redis.conf --maxmemory "${KVSTRATA_MAXMEMORY:?bytes that the operator gives it}"
