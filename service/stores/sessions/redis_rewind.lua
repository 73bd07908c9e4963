#!lua flags=allow-oom
-- ARGV after those of redis_advance.lua: position, model_fingerprint, tokenizer_fingerprint, numerics, energy_joules,
-- snapshot_bytes, snapshot_checksum, num_log_tokens.
local function cut(chunk, num_ids)
  local ids = string.sub(chunk, SEAL_BYTES + 1)
  local left = string.sub(ids, 1, num_ids * 4)
  -- A damaged chunk keeps a seal that does not fit.
  return sealed(ids) == chunk and sealed(left) or string.sub(chunk, 1, SEAL_BYTES) .. left
end

local head, refusal = open_move()
if refusal then return refusal end
local snapshot_bytes, num_kept = tonumber(ARGV[13]), tonumber(ARGV[15])
local num_tokens = tonumber(head.num_log_tokens)
if num_kept > num_tokens then return answer('too_long') end
local turn_changes = end_running(head)
if snapshot_bytes > 0 then
  if redis.call('EXISTS', staged_key) == 0 then return {'unstaged'} end
  take_staged()
else
  redis.call('UNLINK', snapshot_key)
end
local log_chunks, log_marks = tonumber(head.log_chunks), tonumber(head.log_marks)
while num_tokens > num_kept do
  local chunk = redis.call('RPOP', log_key)
  if not chunk then break end -- the log is damaged: reading it will say so
  log_chunks = log_chunks - 1
  num_tokens = num_tokens - (#chunk - SEAL_BYTES) / 4
  if num_tokens < num_kept then
    redis.call('RPUSH', log_key, cut(chunk, num_kept - num_tokens))
    num_tokens = num_kept
    log_chunks = log_chunks + 1
  end
end
while true do
  local mark = redis.call('LINDEX', marks_key, -1)
  if not mark or tonumber(string.match(mark, '^%d+:(%d+)')) <= num_kept then break end
  redis.call('RPOP', marks_key)
  log_marks = log_marks - 1
end
local last = redis.call('LINDEX', marks_key, -1)
turn_changes = drop_results(head, last and tonumber(string.match(last, '^%d+')) or 0) or turn_changes
local retained_end = ARGV[9] == head.model_fingerprint and num_kept or 0
return move_head(head, {
  retained = thin_retained(head, function(one) return tonumber(one.position) <= retained_end end),
  position = ARGV[8], model_fingerprint = ARGV[9], tokenizer_fingerprint = ARGV[10], numerics = ARGV[11],
  energy_joules = ARGV[12], replica = '', snapshot_bytes = ARGV[13], snapshot_checksum = ARGV[14],
  snapshot_version = snapshot_bytes > 0 and whole(head.version + 1) or '0',
  snapshot_position = snapshot_bytes > 0 and ARGV[8] or '0',
  num_log_tokens = whole(num_kept), log_chunks = whole(log_chunks), log_marks = log_marks,
}, turn_changes)
