#!lua flags=allow-oom
-- ARGV: session_id, created_us, version, bytes, expires_us. Answers may overtake each other: the newest version wins.
local session_id, created_us, version = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local old = read_size(session_id)
if old and (old.created_us > created_us or (old.created_us == created_us and old.version > version)) then return 0 end
redis.call('ZADD', index_key, ARGV[2], session_id)
redis.call('ZREM', expired_key, session_id)
write_size(session_id, created_us, version, tonumber(ARGV[4]))
if ARGV[5] == '' then
  redis.call('ZREM', expiry_key, session_id)
else
  redis.call('ZADD', expiry_key, ARGV[5], session_id)
end
drop_expired()
return 1
