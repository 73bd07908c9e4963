#!lua flags=allow-oom
-- KEYS: the hash of a session's count of holders. ARGV: owner, nonce, change. Returns the new count; a count of 0 is
-- deleted. A call that comes a second time, because its answer was lost, finds its own nonce, or no count.
local stored = redis.call('HMGET', KEYS[1], 'version', 'nonce', 'document')
local count = stored[3] and cjson.decode(stored[3]).num_holders or 0
if stored[2] == ARGV[2] then return count end
count = math.max(0, count + tonumber(ARGV[3]))
if count == 0 then
  redis.call('UNLINK', KEYS[1])
else
  local version = tostring(tonumber(stored[1] or '0') + 1)
  local document = cjson.encode({num_holders = count})
  redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'nonce', ARGV[2], 'version', version, 'document', document)
end
return count
