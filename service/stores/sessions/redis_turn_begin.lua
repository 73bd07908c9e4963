#!lua
-- ARGV: created_us, fence, holder, turn_id, identity, digest, base_version ('' for the head's), max_records, request.
local head = read_head()
if not head then return {'not_found'} end
if not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then return {'lease_lost'} end
local now = clock_us()
local turns = read_turns(now)
local running = find_running(turns)
-- The same id is this call again, after its answer was lost.
local found = running and running.id == ARGV[4] and running or find_repeatable(turns, ARGV[5], ARGV[6])
if found then return show_turn(head, found, now, 0) end
if ARGV[7] ~= '' and ARGV[7] ~= head.version then return answer('conflict') end
if running then close_turn(running, 'failed', nil, now + ABANDONED_US) end
redis.call('UNLINK', tail_key)
for position = #turns, 1, -1 do
  if turns[position].id == ARGV[4] then drop_turn(turns, position) end
end
while #turns >= tonumber(ARGV[8]) do drop_turn(turns, 1) end
local turn = {
  number = #turns > 0 and turns[#turns].number + 1 or 1, id = ARGV[4], identity = ARGV[5], digest = ARGV[6], base = head.version, status = 'running', cancel = '0',
  expires = whole(now + RUNNING_US), bytes = #ARGV[9],
}
changed[turn] = true
turns[#turns + 1] = turn
redis.call('HSET', turns_key, 'q:' .. turn.id, ARGV[9])
write_turns(head, turns)
return answer('begun')
