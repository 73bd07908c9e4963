#!lua
-- KEYS: the document's hash. ARGV: owner, nonce, expected version, new version, document, ttl in milliseconds or ''.
-- A call that comes a second time, because its answer was lost, finds its own nonce.
local stored = redis.call('HMGET', KEYS[1], 'version', 'nonce')
if stored[2] == ARGV[2] then return 1 end
if (stored[1] or '0') ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'nonce', ARGV[2], 'version', ARGV[4], 'document', ARGV[5])
if ARGV[6] == '' then
  redis.call('PERSIST', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
end
return 1
