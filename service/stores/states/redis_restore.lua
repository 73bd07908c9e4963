#!lua
-- KEYS: as for redis_add.lua. ARGV: name, nonce, fields, version, newest version (numbers as text: no float rounds them).
-- Returns the version, 0 when the staged bytes have expired, -1 when the version is there. A call that comes a second
-- time, because its answer was lost, finds its own nonce.
local again = redis.call('HGET', KEYS[3], ARGV[2])
if again then return tonumber(again) end
local reference = ARGV[1] .. '@' .. ARGV[4]
if redis.call('HEXISTS', KEYS[1], reference) == 1 then
  redis.call('UNLINK', KEYS[4])
  return -1
end
if redis.call('PERSIST', KEYS[4]) == 0 then return 0 end
redis.call('HSET', KEYS[1], reference, ARGV[2] .. ' ' .. ARGV[3])
local newest = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0) or 0
if newest < tonumber(ARGV[5]) then redis.call('HSET', KEYS[2], ARGV[1], ARGV[5]) end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
return tonumber(ARGV[4])
