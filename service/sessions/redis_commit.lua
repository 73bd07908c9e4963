#!lua
-- ARGV after those of redis_advance.lua: position, model_fingerprint, snapshot_bytes, snapshot_checksum, log ids
-- (bytes), turn_id ('' for none), the turn's result, ttl_us.
local head, refusal = open_move()
if refusal then return refusal end
if redis.call('EXISTS', staged_key) == 0 then return {'unstaged'} end
redis.call('RENAME', staged_key, snapshot_key)
local ids = ARGV[12]
append_log(ids)
end_running(head, ARGV[13], ARGV[14], ARGV[15])
return move_head(head, {
  position = ARGV[8], model_fingerprint = ARGV[9], snapshot_bytes = ARGV[10], snapshot_checksum = ARGV[11],
  num_log_tokens = whole(head.num_log_tokens + #ids / 4),
})
