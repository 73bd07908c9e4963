#!lua flags=allow-oom
local head = read_head()
if not head then return {'not_found'} end
local now = clock_us()
local turns = read_turns(now)
local turn = find_running(turns)
if not turn then return {'none'} end
if lease_left_us(head, now) > 0 then
  turn.cancel, changed[turn] = '1', true
else
  close_turn(turn, 'cancelled', nil, now + ABANDONED_US)
  write_head(head, {holder = '', lease_us = '0'}) -- a lease that ran out is worth nothing any more
end
write_turns(head, turns)
local shown = show_turn(head, turn, now, 0)
shown[1] = turn.status
table.insert(shown, 2, redis.call('HGETALL', head_key))
return shown
