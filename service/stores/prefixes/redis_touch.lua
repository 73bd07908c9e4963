#!lua flags=allow-oom
-- ARGV: name, ttl_us. Used now; 0 when there is none, or it expired.
local used_us = tonumber(redis.call('ZSCORE', used_key, ARGV[1]) or '0')
if used_us <= clock_us() - tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', used_key, whole(clock_us()), ARGV[1])
return 1
