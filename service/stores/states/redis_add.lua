#!lua
-- KEYS: heads (hash: name@version -> "nonce fields"), newest versions (hash: name -> version), additions (hash: nonce ->
-- version), the staged bytes. ARGV: name, nonce, fields. Returns the version, 0 when the staged bytes have expired. A call
-- that comes a second time, because its answer was lost, finds its own nonce.
local again = redis.call('HGET', KEYS[3], ARGV[2])
if again then return tonumber(again) end
if redis.call('PERSIST', KEYS[4]) == 0 then return 0 end
local version = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0) or 0
repeat  -- past every version there is, where the newest ones were lost or damaged
  version = version + 1
until redis.call('HSETNX', KEYS[1], ARGV[1] .. '@' .. version, ARGV[2] .. ' ' .. ARGV[3]) == 1
redis.call('HSET', KEYS[2], ARGV[1], version)
redis.call('HSET', KEYS[3], ARGV[2], version)
return version
