#!lua
-- ARGV after those of redis_advance.lua: position, model_fingerprint, tokenizer_fingerprint, numerics, energy_joules,
-- snapshot_bytes (0: it brings none), snapshot_checksum, log ids (bytes), turn_id ('' for none), the turn's result,
-- ttl_us, versions of older snapshots that stay (joined by commas), replica, version and tokens of the end that the turn
-- went on from ('' for the head), bytes of the ids that become a version of their own ('' for none), version and position
-- of the snapshot.

-- Drops what log, marks and snapshots have behind the end of a version. Returns whether that end was there.
local function cut_behind(head, version, num_kept)
  local num_tokens, num_chunks, num_marks = tonumber(head.num_log_tokens), 0, 0
  while num_tokens > num_kept do
    local chunk = redis.call('LINDEX', log_key, -1 - num_chunks)
    if not chunk then return false end
    num_chunks, num_tokens = num_chunks + 1, num_tokens - (#chunk - SEAL_BYTES) / 4
  end
  local mark
  repeat
    mark = redis.call('LINDEX', marks_key, -1 - num_marks)
    num_marks = num_marks + 1
  until not mark or tonumber(string.match(mark, '^%d+')) <= tonumber(version)
  num_marks = num_marks - 1
  local expected = version .. ':' .. whole(num_kept) .. ':'
  if num_tokens ~= num_kept or not mark or string.sub(mark, 1, #expected) ~= expected then return false end
  for _ = 1, num_chunks do redis.call('RPOP', log_key) end
  for _ = 1, num_marks do redis.call('RPOP', marks_key) end
  head.log_chunks, head.log_marks = whole(head.log_chunks - num_chunks), whole(head.log_marks - num_marks)
  head.num_log_tokens = whole(num_kept)
  return true
end

-- A version that the log has before that of the head.
local function add_version(head, ids)
  head.log_chunks = whole(head.log_chunks + append_log(ids))
  head.version, head.num_log_tokens = whole(head.version + 1), whole(head.num_log_tokens + #ids / 4)
  redis.call('RPUSH', marks_key, table.concat({head.version, head.num_log_tokens, '0', ARGV[7]}, ':'))
  head.log_marks = whole(head.log_marks + 1)
end

local head, refusal = open_move()
if refusal then return refusal end
local has_snapshot = ARGV[13] ~= '0'
if has_snapshot and redis.call('EXISTS', staged_key) == 0 then return {'unstaged'} end
if ARGV[21] ~= '' then
  if not cut_behind(head, ARGV[21], tonumber(ARGV[22])) then return answer('log_corrupt') end
  local last = tonumber(ARGV[21])
  head.retained = thin_retained(head, function(one) return tonumber(one.version) <= last end)
  if tonumber(snapshot_version(head)) > last then
    redis.call('UNLINK', snapshot_key)
    head.snapshot_version, head.snapshot_position, head.snapshot_bytes, head.snapshot_checksum = '0', '0', '0', ''
  end
end
local ids = ARGV[15]
if ARGV[23] ~= '' then
  add_version(head, string.sub(ids, 1, tonumber(ARGV[23])))
  ids = string.sub(ids, tonumber(ARGV[23]) + 1)
end
local log_chunks = head.log_chunks + append_log(ids)
local turn_changes = end_running(head, ARGV[16], ARGV[17], ARGV[18])
-- Of a head of key layout 1, which does not name its snapshot
local changes = {snapshot_version = snapshot_version(head), snapshot_position = snapshot_position(head)}
if has_snapshot then
  changes = replace_snapshot(head, ARGV[19], ARGV[24], ARGV[25], ARGV[13], ARGV[14])
end
changes.position, changes.model_fingerprint = ARGV[8], ARGV[9]
changes.tokenizer_fingerprint, changes.numerics, changes.energy_joules = ARGV[10], ARGV[11], ARGV[12]
changes.replica = ARGV[20]
changes.num_log_tokens = whole(head.num_log_tokens + #ids / 4)
changes.log_chunks, changes.log_marks = whole(log_chunks), whole(head.log_marks)
-- What changed on the way is written, whatever it is at the end
for _, field in ipairs({'retained', 'snapshot_bytes', 'snapshot_checksum'}) do
  changes[field] = changes[field] or head[field]
end
if ARGV[21] ~= '' or ARGV[23] ~= '' then
  for field in pairs(changes) do head[field] = nil end
end
return move_head(head, changes, turn_changes)
