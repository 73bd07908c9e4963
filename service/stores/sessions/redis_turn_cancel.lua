#!lua flags=allow-oom
local head = read_head()
if not head then return {'not_found'} end
local now = clock_us()
local turns = read_turns(now)
local turn = find_running(turns)
if not turn then return {'none'} end
local has_holder = lease_left_us(head, now) > 0
if has_holder then
  turn.cancel, changed[turn] = '1', true
else
  close_turn(turn, 'cancelled', nil, now + ABANDONED_US)
end
local changes = write_turns(head, turns)
if not has_holder then changes.holder, changes.lease_us = '', '0' end -- a lease that ran out is worth nothing any more
write_head(head, changes)
local shown = show_turn(head, turn, now, 0)
shown[1] = turn.status
table.insert(shown, 2, redis.call('HGETALL', head_key))
return shown
