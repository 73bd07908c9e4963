-- Put before the scripts that move the head. ARGV: created_us, fence, holder, expected_version, nonce,
-- num_sampled, seed.
-- Returns the head, or nil and the answer.
local function open_move()
  local head = read_head()
  if not head then
    redis.call('UNLINK', staged_key)
    return nil, {'not_found'}
  end
  local refusal
  if head.commit_nonce == ARGV[5] then
    refusal = 'ok' -- this call again, after its answer was lost
  elseif not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then
    refusal = 'lease_lost'
  elseif head.version ~= ARGV[4] then
    refusal = 'conflict'
  end
  if not refusal then return head, nil end
  redis.call('UNLINK', staged_key)
  return nil, answer(refusal)
end

-- The turn's end: version, times, and the lease that it ran under. `turn_changes`: see redis_turns.lua.
local function move_head(head, changes, turn_changes)
  local now = clock_us()
  for field, value in pairs(turn_changes) do changes[field] = value end
  changes.version = whole(head.version + 1)
  changes.commit_nonce = ARGV[5]
  changes.updated_us = whole(now)
  changes.expires_us = renewed_expiry(head.ttl_us, now)
  changes.holder = ''
  changes.lease_us = '0'
  changes.log_marks = whole((changes.log_marks or head.log_marks) + 1)
  redis.call('RPUSH', marks_key, table.concat({changes.version, changes.num_log_tokens, ARGV[6], ARGV[7]}, ':'))
  write_head(head, changes)
  return answer('ok')
end
