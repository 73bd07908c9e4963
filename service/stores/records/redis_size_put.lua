#!lua flags=allow-oom
-- KEYS: sizes (hash: document's key -> "version:bytes"), their sum. ARGV: document's key, version, bytes.
-- Answers may overtake each other: the newest version wins, but a first version is of a new document.
local old_version, old_bytes = string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '0:0', '^(%d+):(%d+)$')
local version = tonumber(ARGV[2])
if version > 1 and tonumber(old_version) > version then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ':' .. ARGV[3])
redis.call('INCRBY', KEYS[2], string.format('%d', tonumber(ARGV[3]) - tonumber(old_bytes)))
return 1
