#!lua flags=allow-oom
-- KEYS: as for redis_size_put.lua. ARGV: document's key, its entry ('' for any: otherwise another one stays).
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if not entry or (ARGV[2] ~= '' and ARGV[2] ~= entry) then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DECRBY', KEYS[2], string.match(entry, ':(%d+)$'))
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
return 1
