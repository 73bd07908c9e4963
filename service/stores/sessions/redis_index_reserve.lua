#!lua
-- ARGV: session_id. Before a session is made: whatever happens then, no head is without its entry.
local now = clock_us()
redis.call('ZREM', expired_key, ARGV[1])
if not redis.call('ZSCORE', index_key, ARGV[1]) then
  redis.call('ZADD', index_key, whole(now), ARGV[1])
  write_size(ARGV[1], now, 0, 0)
end
return whole(now)
