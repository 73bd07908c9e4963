#!lua
-- ARGV after those of redis_advance.lua: position, model_fingerprint, tokenizer_fingerprint, numerics, energy_joules,
-- snapshot_bytes (0: it brings none), snapshot_checksum, log ids (bytes), turn_id ('' for none), the turn's result,
-- ttl_us, versions of older snapshots that stay (joined by commas), replica.
local head, refusal = open_move()
if refusal then return refusal end
local has_snapshot = ARGV[13] ~= '0'
if has_snapshot and redis.call('EXISTS', staged_key) == 0 then return {'unstaged'} end
local ids = ARGV[15]
local log_chunks = head.log_chunks + append_log(ids)
local turn_changes = end_running(head, ARGV[16], ARGV[17], ARGV[18])
-- Of a head of key layout 1, which does not name its snapshot
local changes = {snapshot_version = snapshot_version(head), snapshot_position = snapshot_position(head)}
if has_snapshot then
  changes = replace_snapshot(head, ARGV[19], whole(head.version + 1), ARGV[8], ARGV[13], ARGV[14])
end
changes.position, changes.model_fingerprint = ARGV[8], ARGV[9]
changes.tokenizer_fingerprint, changes.numerics, changes.energy_joules = ARGV[10], ARGV[11], ARGV[12]
changes.replica = ARGV[20]
changes.num_log_tokens = whole(head.num_log_tokens + #ids / 4)
changes.log_chunks = whole(log_chunks)
return move_head(head, changes, turn_changes)
