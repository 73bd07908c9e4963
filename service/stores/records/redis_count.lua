#!lua flags=allow-oom
-- KEYS: the hash of a session's count of holders. ARGV: owner, nonce, change. Returns the new count; a count of 0 is
-- deleted. A call that comes a second time, because its answer was lost, finds its own nonce, or no count. Many writers
-- change one count, so the nonces of the last 64 changes stay.
local stored = redis.call('HMGET', KEYS[1], 'version', 'nonces', 'document')
local count = stored[3] and cjson.decode(stored[3]).num_holders or 0
local nonces = stored[2] or ''
if string.find(nonces, ARGV[2], 1, true) then return count end
count = math.max(0, count + tonumber(ARGV[3]))
if count == 0 then
  redis.call('UNLINK', KEYS[1])
else
  local version = tostring(tonumber(stored[1] or '0') + 1)
  local document = cjson.encode({num_holders = count})
  nonces = string.sub(ARGV[2] .. nonces, 1, 64 * #ARGV[2])
  redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'nonces', nonces, 'version', version, 'document', document)
end
return count
