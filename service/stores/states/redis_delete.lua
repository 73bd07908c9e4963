#!lua flags=allow-oom
-- KEYS: as for redis_add.lua, with the bytes of the state at the end. ARGV: name@version, nonce of the bytes.
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('UNLINK', KEYS[4])
return 1
