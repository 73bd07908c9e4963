#!lua
-- ARGV: tenant, session_id, nonce, created_us, model_fingerprint, metadata, ttl_us, forked_from, version, position,
-- tokenizer_fingerprint, numerics, energy_joules, snapshot_version, snapshot_position, snapshot_bytes,
-- snapshot_checksum, log ids (bytes), marks (lines).
local head = read_head()
if head then
  redis.call('UNLINK', staged_key)
  -- The same nonce is this call again, after its answer was lost.
  return answer(head.nonce == ARGV[3] and 'ok' or 'exists')
end
local snapshot_bytes, ids = tonumber(ARGV[16]), ARGV[18]
if snapshot_bytes > 0 and redis.call('EXISTS', staged_key) == 0 then return {'unstaged'} end
redis.call('UNLINK', log_key, marks_key, snapshot_key, unpack(KEYS, 6))
if snapshot_bytes > 0 then take_staged() end
local log_chunks, log_marks = append_log(ids), 0
for mark in string.gmatch(ARGV[19], '[^\n]+') do log_marks = redis.call('RPUSH', marks_key, mark) end
write_head({}, {
  tenant = ARGV[1], session_id = ARGV[2], nonce = ARGV[3], created_us = ARGV[4], updated_us = ARGV[4],
  model_fingerprint = ARGV[5], metadata = ARGV[6], ttl_us = ARGV[7], forked_from = ARGV[8],
  expires_us = renewed_expiry(ARGV[7], tonumber(ARGV[4])), version = ARGV[9], position = ARGV[10],
  tokenizer_fingerprint = ARGV[11], numerics = ARGV[12], energy_joules = ARGV[13],
  snapshot_version = ARGV[14], snapshot_position = ARGV[15], snapshot_bytes = ARGV[16], snapshot_checksum = ARGV[17],
  num_log_tokens = whole(#ids / 4), log_chunks = whole(log_chunks), log_marks = whole(log_marks),
  fence = '0', holder = '', lease_nonce = '', lease_us = '0', commit_nonce = '',
  turn_bytes = '0', turns_us = '0', retained = '',
})
return answer('ok')
