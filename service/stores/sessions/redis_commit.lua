#!lua
-- ARGV after those of redis_advance.lua: position, model_fingerprint, snapshot_bytes, snapshot_checksum, log ids
-- (bytes), turn_id ('' for none), the turn's result, ttl_us, versions of older snapshots that stay (joined by commas),
-- "version:position:bytes" of the one that joins them ('' for none).
local function join_retained(retained)
  if ARGV[17] == '' then return retained end
  local is_taken = {}
  for slot in string.gmatch(retained, '(%d+):%d+:%d+:%d+') do is_taken[slot] = true end
  local slot = 1
  while is_taken[tostring(slot)] do slot = slot + 1 end
  redis.call('RENAME', staged_retained_key, retained_key(slot))
  return (retained == '' and '' or retained .. ',') .. slot .. ':' .. ARGV[17]
end

local head, refusal = open_move()
if refusal then return refusal end
if redis.call('EXISTS', staged_key) == 0 then return {'unstaged'} end
if ARGV[17] ~= '' and redis.call('EXISTS', staged_retained_key) == 0 then return {'unstaged'} end
redis.call('RENAME', staged_key, snapshot_key)
local ids = ARGV[12]
local log_chunks = head.log_chunks + append_log(ids)
end_running(head, ARGV[13], ARGV[14], ARGV[15])
local kept_versions = ',' .. ARGV[16] .. ','
local retained = thin_retained(head, function(one)
  return string.find(kept_versions, ',' .. one.version .. ',', 1, true)
end)
return move_head(head, {
  retained = join_retained(retained),
  position = ARGV[8], model_fingerprint = ARGV[9], snapshot_bytes = ARGV[10], snapshot_checksum = ARGV[11],
  num_log_tokens = whole(head.num_log_tokens + #ids / 4), log_chunks = whole(log_chunks),
})
