#!lua flags=allow-oom
-- ARGV: created_us.
local head = read_head()
if not head or head.created_us ~= ARGV[1] then return {'not_found'} end
redis.call('UNLINK', head_key, log_key, marks_key, snapshot_key, unpack(KEYS, 6))
return {'ok'}
