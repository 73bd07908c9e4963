#!lua
-- ARGV: created_us, fence, holder, turn_id, index, chunk. The answer has the head when its tenant's usage is due for an update.
local USAGE_STEP_BYTES = 16 * 1024 -- of growth: a turn adds a few hundred bytes ten times a second
local head = read_head()
if not head then return {'not_found'} end
if not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then return {'lease_lost'} end
local turns = read_turns(clock_us())
local turn = find_running(turns)
local num_chunks, index, is_due = redis.call('LLEN', tail_key), tonumber(ARGV[5]), false
if not turn or turn.id ~= ARGV[4] or index > num_chunks then return {'gone'} end
if index == num_chunks then
  redis.call('RPUSH', tail_key, ARGV[6])
  local bytes = turn.bytes + #ARGV[6]
  is_due = math.floor(bytes / USAGE_STEP_BYTES) > math.floor(turn.bytes / USAGE_STEP_BYTES)
  turn.bytes, changed[turn] = bytes, true
  write_head(head, write_changes(head, turns, {}), index == 0)
end
return {'ok', turn.cancel, is_due and redis.call('HGETALL', head_key) or nil}
